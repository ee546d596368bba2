"""What a trained model scores, and by which protocol.

    request.py      what is asked for: task, protocol, data; the protocols of each task
    pieces.py       a few tokens and the targets among them: what is scored, also of a long sequence
    scorer.py       log-probabilities of pieces, in batches, shared out to the ranks
    reading.py      the files of the tasks
    task.py         what every task is, what it needs to know of a model, and its figures
    stream.py       running text in windows
    wikitext.py, perplexity.py, lambada.py, hellaswag.py     the tasks
    tasks.py        the tasks by name
    report.py       what is printed, beside what others found with GPT-2's weights
    parser.py       the flags of the model
    setting.py      that model among the ranks, and how far it is
    command.py      python -m megatron.evaluate
    writer.py       texts that end where they are told to
    bridge.py       lm-eval's face of a model of ours
    harness.py      python -m megatron.evaluate.harness: lm-eval's tasks
"""

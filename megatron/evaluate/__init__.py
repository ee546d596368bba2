"""What a trained model scores, and by which protocol.

    request.py      what is asked for: task, protocol, data; the protocols of each task
    windows.py      which tokens of a long sequence are read, and which are scored: arithmetic
    pieces.py       a few tokens and the targets among them: what is scored
    likelihood.py   how likely targets are, of logits that are cut over ranks
    scorer.py       log-probabilities of pieces, in batches, shared out to the ranks
    reading.py      the files of the tasks
    outcome.py      loss, perplexities, bits per byte, accuracies
    task.py         what every task is, and what it needs to know of a model
    stream.py       running text in windows
    detokenise.py   WikiText as it was before it was cut into words
    wikitext.py, perplexity.py, lambada.py, hellaswag.py     the tasks
    tasks.py        the tasks by name
    published.py    what others found with GPT-2's weights
    progress.py     how far it is
    report.py       what is printed
    parser.py       the flags of the model
    setting.py      that model among the ranks
    command.py      python -m megatron.evaluate
    writer.py       texts that end where they are told to
    bridge.py       lm-eval's face of a model of ours
    harness.py      python -m megatron.evaluate.harness: lm-eval's tasks
"""

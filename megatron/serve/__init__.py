"""An HTTP server for a trained model: Megatron's `/api`, OpenAI's `/v1/completions`, and a page to try it.

Two threads: the model's (main) runs the scheduler and generator steps (scheduler.py), the clients' runs
uvicorn (http_server.py) with a Starlette application (app.py). They exchange only the records of scheduler.py.
openai_api.py and megatron_api.py translate requests.
"""

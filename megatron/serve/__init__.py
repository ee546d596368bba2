"""An HTTP server for a trained model: Megatron's `/api`, OpenAI's `/v1/completions`, and a page to try it.

Two threads: the model's (main) runs the generator's steps, the clients' runs uvicorn with an ASGI application (app.py).
They share a queue (scheduler.py). api.py reads requests and writes answers.
"""

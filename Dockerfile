# docker build -t gpt2 .
# docker build -t gpt2 --build-arg BASE=nvidia/cuda:13.0.1-base-ubuntu24.04 .      for NVIDIA GPUs
# docker run --rm -v gpt2_runs:/gpt2/runs gpt2                                     the quick start; again: it resumes
# docker run --rm --gpus all --shm-size 8g -v gpt2_runs:/gpt2/runs gpt2 bash scripts/pretrain_gpt2_distributed.sh
ARG BASE=python:3.12-slim
FROM ${BASE}
# PyTorch's index of CPU builds makes an image without CUDA's libraries, which are 4 GB.
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 VIRTUAL_ENV=/venv PATH=/venv/bin:$PATH
# A C compiler and Python's headers are for torch.compile; a base without Python gets its distribution's.
RUN apt-get update && apt-get install -y --no-install-recommends g++ \
    $(python3 -c 'import ensurepip' 2>/dev/null || echo python3-dev python3-venv) && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --system-site-packages /venv
WORKDIR /gpt2
# The packages are a layer of their own, which a change of the sources leaves as it is.
COPY requirements.txt pretrain_gpt2.py ./
COPY scripts/setup.sh scripts/
RUN bash scripts/setup.sh
COPY . .
CMD ["bash", "scripts/pretrain_gpt2.sh"]

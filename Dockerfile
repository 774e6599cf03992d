# CUDA, Python 3.12 and this repository with its .venv in /workspace, as examples/llama3_1/kubernetes.yaml expects it:
#
#     docker build -t llama-patch .
#     docker run --gpus all --ipc host -v /models:/models -v /data:/data -v /runs:/runs llama-patch llama-patch doctor
#
# GPUs need a driver of CUDA 13 on the host. CUDA's compiler is for requirements-gpu.txt, g++ and Python.h for kernels.
FROM nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /workspace
COPY . .
RUN make .venv/installed
ENV PATH=/workspace/.venv/bin:$PATH
CMD ["llama-patch", "--help"]

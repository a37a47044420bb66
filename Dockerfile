# flatout and PyTorch in one image.
#
#     docker build -t flatout .                                                          the CPU build of torch
#     docker build -t flatout --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .      CUDA
#     docker run --rm -v "$PWD":/work flatout tune python train.py
#
FROM python:3.11-slim

# compile needs a C++ compiler; jemalloc and tcmalloc are allocators that the lever malloc can choose.
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ libjemalloc2 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "torch>=2.11,<2.15" torchvision --index-url ${TORCH_INDEX}

COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir "/src[malloc]" && flatout --version

WORKDIR /work
ENTRYPOINT ["flatout"]
CMD ["--help"]

# flatout and PyTorch in one image.
#
#     docker build -t flatout .                                                          the CPU build of torch
#     docker build -t flatout --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 .      CUDA
#     docker run --rm -v "$PWD":/work flatout tune python train.py
#     docker build --target test .                                                       the fast tests
#
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

FROM python:3.11-slim AS torch
# compile needs a C++ compiler; jemalloc and tcmalloc are allocators that the lever malloc can choose.
RUN apt-get update \
    && apt-get install --no-install-recommends -y g++ libjemalloc2 libtcmalloc-minimal4 \
    && rm -rf /var/lib/apt/lists/*
ARG TORCH_INDEX
RUN pip install --no-cache-dir "torch>=2.11,<2.15" torchvision --index-url ${TORCH_INDEX}

FROM torch AS test
RUN apt-get update \
    && apt-get install --no-install-recommends -y git make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
# Its environment shows the image's torch.
RUN make quick

FROM torch
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN pip install --no-cache-dir /src && flatout --version

WORKDIR /work
ENTRYPOINT ["flatout"]
CMD ["--help"]

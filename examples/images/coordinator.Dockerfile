# A coordinator. From the project's folder:
#   docker build -f examples/images/coordinator.Dockerfile -t hypergpu-coordinator .
ARG BASE=debian:12-slim

FROM ${BASE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/hypergpu
WORKDIR /src
COPY . .
# torch is for the evaluator; it has no GPU here, and the build for processors is a tenth of the size.
ARG EXTRAS=chain,postgresql,s3,torch
ARG PIP_OPTIONS="--extra-index-url https://download.pytorch.org/whl/cpu"
RUN /opt/hypergpu/bin/pip install --no-cache-dir ${PIP_OPTIONS} ".[${EXTRAS}]"

FROM ${BASE}
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --system --uid 7700 --home-dir /var/lib/hypergpu --create-home hypergpu
COPY --from=build /opt/hypergpu /opt/hypergpu
ENV PATH=/opt/hypergpu/bin:$PATH \
    HYPERGPU_IMAGE=hypergpu-coordinator \
    HYPERGPU_COORDINATOR_DATA_DIR=/var/lib/hypergpu/coordinator
USER hypergpu
VOLUME /var/lib/hypergpu
EXPOSE 7700 7701 7701/udp 7702
STOPSIGNAL SIGTERM
ENTRYPOINT ["hypergpu-coordinator"]

# acp-agent on the network:      docker run -p 127.0.0.1:8080:8080 -e ACP_AGENT_TOKEN=... acp-agent
# on standard input and output:  docker run -i --rm -v "$PWD:/workspace" acp-agent serve
# Two stages, so that neither pip, nor its cache, nor the sources are in what ships.
ARG BASE=python:3.13.16-slim-bookworm

FROM ${BASE} AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY acp_server acp_server
COPY agent_core agent_core
COPY conformance conformance
RUN python3 -m venv --without-pip /opt/acp-agent \
 && python3 -m venv /opt/pip \
 && /opt/pip/bin/pip --python /opt/acp-agent install \
    --no-cache-dir --disable-pip-version-check '.[otel]'

FROM ${BASE}
LABEL org.opencontainers.image.title="acp-agent" \
      org.opencontainers.image.description="An ACP agent whose Stop button is provably right" \
      org.opencontainers.image.licenses="Apache-2.0"
# The base image's pip goes, too: nothing is installed into a container that runs.
RUN rm -rf /usr/local/lib/python3.*/site-packages/pip* /usr/local/bin/pip* \
 && useradd --no-log-init --create-home --uid 10001 agent \
 && install -d -o agent -g agent /workspace /state
COPY --from=build /opt/acp-agent /opt/acp-agent
ENV PATH=/opt/acp-agent/bin:$PATH \
    ACP_AGENT_STATE_DIR=/state \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /workspace
VOLUME ["/state"]
EXPOSE 8080
HEALTHCHECK --interval=30s --timeout=5s --start-period=20s --retries=3 \
  CMD ["python3", "-c", "from urllib.request import urlopen; urlopen('http://127.0.0.1:8080/healthz', timeout=4)"]
ENTRYPOINT ["acp-agent"]
# Without ACP_AGENT_TOKEN, or --token-file, it says that it needs one and ends.
CMD ["serve", "--listen", "0.0.0.0:8080"]

# acp-agent on standard input and output: docker run -i --rm -v "$PWD:/workspace" acp-agent
# Two stages, so that neither pip's cache nor the sources are in what ships.
FROM python:3.13-slim-bookworm AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY acp_server acp_server
COPY agent_core agent_core
COPY conformance conformance
RUN python -m venv /opt/acp-agent \
 && /opt/acp-agent/bin/pip install --no-cache-dir --disable-pip-version-check .

FROM python:3.13-slim-bookworm
COPY --from=build /opt/acp-agent /opt/acp-agent
RUN useradd --create-home --uid 10001 agent \
 && install -d -o agent -g agent /workspace /state
ENV PATH=/opt/acp-agent/bin:$PATH \
    ACP_AGENT_STATE_DIR=/state \
    PYTHONDONTWRITEBYTECODE=1
USER 10001
WORKDIR /workspace
VOLUME ["/state"]
ENTRYPOINT ["acp-agent"]
CMD ["serve"]

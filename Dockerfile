# The daemon and its command line; no torch, no CUDA: engines bring their own.
#
#   docker build -t hicache .
#   install -d -o 10001 -g 10001 -m 0750 /run/hicache /var/lib/hicache    # once per host; Docker would make them root's
#   docker run --rm --memory 10g -v /run/hicache:/run/hicache -v /var/lib/hicache:/var/lib/hicache \
#     hicache --set l2.size=8GiB --set l3.enabled=true --set l3.path=/var/lib/hicache
#
# Engines reach the daemon through the sockets in /run/hicache, so that folder is shared with them, and they run as the
# daemon's user (10001) or as root. tools/check_dockerfile.py runs every step of this file without a Docker engine.

FROM debian:bookworm-slim AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3.11 python3.11-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY pyproject.toml constraints.txt README.md ./
COPY hicache hicache
COPY daemon daemon
COPY client client
RUN python3.11 -m venv /opt/hicache \
    && /opt/hicache/bin/pip install --no-cache-dir --constraint constraints.txt '.[daemon]' \
    && /opt/hicache/bin/python -m compileall -q /opt/hicache/lib

FROM debian:bookworm-slim
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.11 \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --system --gid 10001 hicache \
    && useradd --system --uid 10001 --gid 10001 --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin hicache \
    && install --directory --owner hicache --group hicache --mode 0750 /run/hicache /var/lib/hicache
COPY --from=build /opt/hicache /opt/hicache
COPY configs/default.yaml /etc/hicache/config.yaml
ENV PATH=/opt/hicache/bin:/usr/local/bin:/usr/bin:/bin
ENV HICACHE_CONFIG=/etc/hicache/config.yaml
ENV HICACHE__SERVER__RUNTIME_DIR=/run/hicache
ENV HICACHE__SERVER__LOG_FORMAT=json
USER hicache
VOLUME /run/hicache /var/lib/hicache
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 CMD ["hicache", "status", "--ready"]
ENTRYPOINT ["hicached"]

# The base installation, which measures servers and reads results; it has no torch. From the root of a checkout:
#
#     docker build -t specharness .
#     docker run --rm --network host --user "$(id -u):$(id -g)" -v "$PWD:/work" specharness \
#         latency engine=server engine.url=http://127.0.0.1:8000/v1 engine.regular_url=http://127.0.0.1:8001/v1
FROM python:3.13-slim AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY conf conf
COPY harness harness
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

FROM python:3.13-slim
COPY constraints.txt /tmp/
RUN --mount=from=build,source=/wheel,target=/wheel \
    pip install --no-cache-dir --constraint /tmp/constraints.txt /wheel/*.whl
# Any user may run it: what it writes is below /work.
ENV HOME=/tmp
WORKDIR /work
ENTRYPOINT ["harness"]
CMD ["--help"]

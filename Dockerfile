# An image for a machine with NVIDIA GPUs, whose torch brings CUDA:
#
#   docker build -t trl-multiagent .
#   docker run --gpus all -v "$PWD/outputs:/work/outputs" trl-multiagent train magrpo --config magrpo_demo
#
# The steps before pip were built on a stand-in for the base image, Debian 12 with Python 3.12; the pip command was run in an
# empty environment on a CPU. The image itself has not been built.
FROM python:3.12-slim
# DeepSpeed builds a small extension at its first run
RUN apt-get update && apt-get install -y --no-install-recommends g++ git && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/trl_multiagent
COPY constraints.txt pyproject.toml setup.py README.md LICENSE ./
COPY trl_multiagent trl_multiagent
COPY recipes recipes
COPY accelerate_configs accelerate_configs
RUN pip install --no-cache-dir -c constraints.txt ".[deepspeed,quantization]"
WORKDIR /work
ENTRYPOINT ["trl-multiagent"]
CMD ["env"]

#!/usr/bin/env bash
# Runs a command of this repository on a machine that has torch and a GPU but no package index.
#
#   scripts/on_gpu.sh study PART...     what a GPU is to show, in parts of under eight minutes: graphs 0.5B-lora 0.5B-full hidden code
#   scripts/on_gpu.sh wheels            with an index: collects in .whl what such a machine lacks (25 MB)
#   scripts/on_gpu.sh python3 -m benchmarks.engine.gpu --parts 0.5B-full     there, with .whl beside the repository's files
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON_VERSION=${PYTHON_VERSION:-3.12}
# All but torch and what comes with it. Their own requirements are listed, because some of them would replace torch
MISSING="accelerate annotated-types datasets dill execnet httpcore2 httpx2 huggingface-hub multiprocess omegaconf peft pydantic \
pydantic-core pytest-xdist tokenizers transformers trl truststore typing-inspection"

if [ "${1:-}" = wheels ]; then
	platforms=()
	for glibc in 2_28 2_27 2_17; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
	python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version "$PYTHON_VERSION" \
		--implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -c constraints.txt -d .whl $MISSING
	python3 -m pip wheel --quiet --no-deps -w .whl .  # for its metadata: the code is that of this folder
	exit
fi
site=/tmp/trl_multiagent_wheels
[ -d "$site" ] || python3 -m pip install --quiet --no-index --no-deps --target "$site" .whl/*.whl
export PYTHONPATH="$PWD:$site" HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ "${1:-}" = study ]; then
	shift
	for part in ${@:-graphs 0.5B-lora 0.5B-full hidden code}; do
		case $part in
			graphs) command="python3 -m pytest -q -p no:cacheprovider tests/test_generation.py -k graph" ;;
			hidden) command="python3 -m trl_multiagent.cli train magrpo --config hidden --seeds 1,2,3" ;;
			code) command="python3 -m trl_multiagent.cli train magrpo --config magrpo_mbpp_smollm2 --model_name ${MODEL:-Qwen/Qwen2.5-Coder-0.5B-Instruct} --max_steps 20" ;;
			*) command="python3 -m benchmarks.engine.gpu --turns 1 --parts $part --output ${OUT:-.}/gpu.json" ;;
		esac
		timeout 470 $command || echo "$part has failed, or did not end in time" >&2
	done
	exit
fi
exec "$@"

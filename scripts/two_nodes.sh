#!/usr/bin/env bash
# Trains the demo on two nodes: a run whose second node dies, and the run that resumes it. The nodes are network
# namespaces of this machine, joined by a virtual cable and by nothing else, so it needs root and iproute2. The commands
# on the nodes are those of docs/distributed.md.
#
#   scripts/two_nodes.sh FOLDER           # the nodes have a common output folder
#   scripts/two_nodes.sh FOLDER --apart   # each node has a folder of its own
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
folder=$(realpath -m "$1")
apart=${2:-}
names=(two_nodes_$$_0 two_nodes_$$_1)
trap 'for name in "${names[@]}"; do ip netns delete "$name"; done' EXIT
for name in "${names[@]}"; do ip netns add "$name"; done
ip -n "${names[0]}" link add cable type veth peer name cable netns "${names[1]}"
for k in 0 1; do
	ip -n "${names[$k]}" address add "10.0.0.$((k + 1))/24" dev cable
	ip -n "${names[$k]}" link set cable up
	ip -n "${names[$k]}" link set lo up
done

output_of() { if [ "$apart" ]; then echo "$folder/node$1"; else echo "$folder"; fi; }

start() {  # the training on node $1, whose process becomes a child of this script
	RUN_ID=run GLOO_SOCKET_IFNAME=cable RES_OPTIONS="timeout:1 attempts:1" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 \
		ip netns exec "${names[$1]}" accelerate launch --config_file accelerate_configs/multi_node_ddp.yaml \
		--num_machines 2 --num_processes 2 --machine_rank "$1" --main_process_ip 10.0.0.1 --main_process_port 29500 \
		recipes/code_generation/train_magrpo.py --config recipes/code_generation/configs/magrpo_demo.yaml \
		--resume_from_checkpoint auto --override "output.base_dir=$(output_of "$1")" magrpo.max_steps=12 \
		magrpo.save_strategy=steps magrpo.save_steps=2 ${apart:+magrpo.save_on_each_node=true} >> "$folder/node$1.log" 2>&1 &
	nodes[$1]=$!
}

mkdir -p "$folder"
nodes=()
for k in 0 1; do start $k; done
while [ ! -d "$(output_of 0)/job_run/checkpoint-4" ]; do
	kill -0 "${nodes[0]}" || { tail -n 5 "$folder"/node*.log; exit 1; }
	sleep 1
done
echo "checkpoint-4 is there: node 1 dies"
ip netns pids "${names[1]}" | xargs kill -KILL
for k in 0 1; do
	if wait "${nodes[$k]}" 2> /dev/null; then echo "node $k went on"; exit 1; fi
done
echo "node 0 has ended, too: both start again"
for k in 0 1; do start $k; done
for k in 0 1; do wait "${nodes[$k]}"; done
for k in 0 1; do ls -d "$(output_of $k)"/job_run/checkpoint-12; done

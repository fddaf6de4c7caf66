#!/usr/bin/env bash
#SBATCH --job-name=aarlib
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
# A Ray cluster inside one Slurm allocation, and a command on it; requeued, the run goes on at its last checkpoint.
#   sbatch cluster/slurm.sh python -m pipelines.train pipelines/configs/olmoe_tulu3.toml --ray.storage=/shared/runs
# Run from the repository, in an environment that every node sees. Everyone needs the token that is drawn here; the dashboard
# listens on the head's loopback.
set -euo pipefail

(($# > 0)) || { echo "usage: sbatch cluster/slurm.sh COMMAND..." >&2; exit 2; }
port=${AARLIB_RAY_PORT:-6379}
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}

export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN=${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export RAY_AUTH_TOKEN RAY_USAGE_STATS_ENABLED=0

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
read -r head_ip _ < <(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
export RAY_ADDRESS=$head_ip:$port

steps=()
stop() { # one TERM to each step: ray start --block ends its node on it
  ((${#steps[@]} == 0)) || kill "${steps[@]}" 2>/dev/null || true
  wait
}
trap stop EXIT

start() { # start NODE RAY-START-OPTIONS...
  srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" \
    ray start --num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats --block "${@:2}" &
  steps+=($!)
}

start "$head" --head --node-ip-address="$head_ip" --port="$port" --dashboard-host=127.0.0.1
for ((attempt = 1; ; attempt++)); do
  ray health-check --address "$RAY_ADDRESS" >/dev/null 2>&1 && break
  ((attempt < 60)) || { echo "the Ray head on $head did not come up" >&2; exit 1; }
  sleep 2
done
for node in "${nodes[@]:1}"; do start "$node" --address="$RAY_ADDRESS"; done
python - "${#nodes[@]}" <<'PYTHON'
import sys, time
import ray
ray.init(address="auto", log_to_driver=False)
for _ in range(150):
    if sum(node["Alive"] for node in ray.nodes()) >= int(sys.argv[1]):
        raise SystemExit(0)
    time.sleep(2)
raise SystemExit(f"not all of the {sys.argv[1]} nodes joined the cluster within 5 minutes")
PYTHON
"$@"

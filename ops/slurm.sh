#!/usr/bin/env bash
# Serve a model with a prefill node, a decode node and a router: docs/operate/kubernetes.md.
#SBATCH --job-name=kvspec
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
set -euo pipefail
model=$1
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
KVSPEC_SECRET=$(openssl rand -hex 32)
export KVSPEC_SECRET # srun passes it to both engines.

serve() { # role, node
  local config
  config=$(printf '{"kv_connector": "KvspecConnector", "kv_role": "%s",
    "kv_connector_module_path": "kvspec.adapters.vllm.connector",
    "kv_connector_extra_config": {"host": "0.0.0.0", "port": "9000-9007", "public": "%s"}}' "$1" "$2")
  srun --nodes=1 --ntasks=1 --nodelist="$2" --overlap \
    vllm serve "$model" --port 8100 --kv-transfer-config "$config" &
}

serve kv_producer "${nodes[0]}"
serve kv_consumer "${nodes[1]}"
for node in "${nodes[@]}"; do
  until curl --silent --fail "http://$node:8100/health" >/dev/null; do
    [[ $(jobs -rp | wc -l) == 2 ]] || exit 1 # An engine has ended: its log has the reason.
    sleep 5
  done
done
kvspec check --producer "${nodes[0]}:9000" --consumer "${nodes[1]}:9000"
python examples/router.py --prefill "http://${nodes[0]}:8100" --decode "http://${nodes[1]}:8100" \
  --host 0.0.0.0 --port 8000

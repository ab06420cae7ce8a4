#!/bin/bash
#SBATCH --job-name=raydpfl --nodes=4 --ntasks-per-node=1 --exclusive --time=24:00:00
# A node of Ray on every node of the allocation, and a run over all of them: sbatch cluster/slurm.sh CONFIG DIR
# From a folder that all nodes see, with raydpfl installed in .venv. The same command again goes on with a run that was cut off.
set -euo pipefail
config=$1 out=$2 resume=()
if [ -e "$out/config.yaml" ]; then resume=(--resume); fi
export PATH=$PWD/.venv/bin:$PATH RAYDPFL_CACHE=${RAYDPFL_CACHE:-$PWD/.cache/raydpfl}
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$PWD/.cache/ray_token RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=300
mkdir -p .cache
[ -s "$RAY_AUTH_TOKEN_PATH" ] || (umask 077 && python -c 'import secrets; print(secrets.token_hex())' > "$RAY_AUTH_TOKEN_PATH")
srun --wait=30 ray symmetric-run --address "$(hostname):6379" --min-nodes "$SLURM_JOB_NUM_NODES" --num-cpus "$SLURM_CPUS_ON_NODE" -- \
  raydpfl run "$config" --out "$out" --address auto "${resume[@]}"

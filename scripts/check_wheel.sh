#!/usr/bin/env bash
# Installs a wheel into an empty environment, and goes a newcomer's way with it in an empty folder.
#
#     scripts/check_wheel.sh dist/oapl-0.1.0-py3-none-any.whl [CONSTRAINTS]
set -euo pipefail
wheel=$(realpath "$1")
constraints=$(realpath "${2:-constraints-cpu.txt}")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --constraint "$constraints" "$wheel"
cd "$folder"
export PATH="$folder/venv/bin:$PATH"
unset PYTHONPATH
small=(--trainer.num_steps 4 --trainer.weight_sync_steps 2 --trainer.prompts_per_step 8
    --evaluation.num_prompts 8 --evaluation.num_generations 4)
oapl --version
oapl doctor
oapl train countdown --dry_run > dry_run.txt
oapl train countdown "${small[@]}"
oapl inspect runs/countdown
oapl report runs/countdown --no_scores
oapl eval runs/countdown
test -s runs/countdown/summary.json
test -s runs/countdown/report.html
echo "The wheel works: $(basename "$wheel")"

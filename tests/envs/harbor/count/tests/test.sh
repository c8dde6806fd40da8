#!/bin/bash
python3 - <<'PY'
import json
right = open("/srv/job/answer").read().strip() == "137"
logged = open("/srv/job/log").read().split() == ["begun", "137"]
with open("/logs/verifier/reward.json", "w") as file:
    json.dump({"answer": float(right), "log": float(logged)}, file)
PY

#!/bin/bash
echo "$GREETING $(bash /solution/name.sh)" > "$TARGET"

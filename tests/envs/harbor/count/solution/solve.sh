wc -l < /opt/data/numbers | tee answer >> log

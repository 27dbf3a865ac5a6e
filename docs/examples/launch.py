"""Start a command once for each rank on this machine: python launch.py 2 train.py strategy=ddp run_id=mine"""

import os
import socket
import subprocess
import sys

ranks, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
started = [subprocess.Popen(command, env={**common, "RANK": str(rank)}) for rank in range(ranks)]
codes = [process.wait() for process in started]
sys.exit(next((code for code in codes if code), 0))

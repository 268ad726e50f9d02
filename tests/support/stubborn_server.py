"""An echo server that ignores SIGTERM and has left a process of its own behind, in another session: what a guard must
find. `stubborn_server.py NAME ...`: the name marks both processes, the rest is for `echo_server`."""

import signal
import subprocess
import sys
from pathlib import Path

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
# Its parent ends at once, so that it is nobody's child.
grandchild = (
    "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
)
child = (
    f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}, sys.argv[1]])"
)
subprocess.run([sys.executable, "-c", child, sys.argv[1]], start_new_session=True, check=True)
server = Path(__file__).with_name("echo_server.py")
sys.exit(subprocess.call([sys.executable, str(server), *sys.argv[2:]]))

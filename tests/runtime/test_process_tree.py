"""Peak memory counts descendants, and keeps the peak after they are gone."""

import subprocess
import sys
import time

from aarlib.runtime.process_tree import PeakMemory, tree_memory_gib

HOLD = "import sys; block = bytearray(b'x') * (300 << 20); print('ready', flush=True); sys.stdin.read()"


def test_the_peak_holds_the_memory_of_a_child_that_is_gone():
    before = tree_memory_gib()
    with PeakMemory(interval_s=0.05) as peak:
        child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline().strip() == b"ready"
        time.sleep(0.3)
        child.communicate()
    assert 0.25 < peak.gib - before < 0.5
    assert tree_memory_gib() < before + 0.1

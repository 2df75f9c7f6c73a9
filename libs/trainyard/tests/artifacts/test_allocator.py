"""Memory for large messages stays with a program that asked for it."""

import subprocess
import sys

# Page faults of a hundred rounds, each of which takes eight blocks of a MiB and gives them back.
ROUNDS = """
import resource

def rounds(count):
    for _ in range(count):
        blocks = [b"x" * (1 << 20) for _ in range(8)]
    del blocks
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

before = rounds(10)
print(rounds(100) - before)
"""
PAGES = 100 * 8 * 256


def faults(beginning=""):
    done = subprocess.run([sys.executable, "-c", beginning + ROUNDS], check=True, capture_output=True)
    return int(done.stdout)


def test_blocks_that_were_given_back_are_taken_again_without_asking_the_kernel():
    kept = faults("from trainyard.artifacts.allocator import keep_large_blocks; keep_large_blocks()")
    assert kept < PAGES / 20 < faults()

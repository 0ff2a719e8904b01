"""The write-back's life, simulated: real code, virtual time, a disk and origins that fail on purpose.

    python -m tests.simulation --seed 1 --steps 1000 --dialect all

Several workers and the background process of one node run on one event loop whose clock jumps to whatever comes next.
A seed replays to the byte. `world.py` says what happens, `invariants.py` what must hold whatever does.
"""

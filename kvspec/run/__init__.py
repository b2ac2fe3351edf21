"""Run a plan between real processes, with one session for each rank of two engines.

`local.run_transfer` starts the ranks, moves the cache of one engine to the other, and compares
every byte of each consumer with the byte oracle. `launched.run_launched` is one rank of such a run
on several machines. `recovery.run_recovery` moves many requests and kills ranks meanwhile.
`kvspec transfer` prints their reports.
"""

"""Let the waiting workers of vLLM sleep. Python imports this file in each process of the servers.

vLLM's workers yield and try again. If there are more workers than cores, they keep all other
processes from running, among them the engines' heartbeats.
"""

import os
import time

os.sched_yield = lambda: time.sleep(1e-3)

"""llama.cpp's server by xllamacpp, in an environment that has nothing else.

    python launch_llama_cpp.py MODEL.gguf PORT SLOTS CONTEXT_TOKENS

A slot has CONTEXT_TOKENS / SLOTS of the context. Serves until it is killed.
"""

import sys
import threading

from xllamacpp import CommonParams, Server

path, port, slots, context_tokens = sys.argv[1:]
params = CommonParams()
params.model.path = path
params.port = int(port)
params.hostnames = ["127.0.0.1"]
params.n_parallel = int(slots)
params.n_ctx = int(context_tokens)
server = Server(params)
threading.Event().wait()

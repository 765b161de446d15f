"""The HTTP side: bodies in, asks to the desk, answers and streams out.

Owns `wire*` (the bodies of each endpoint and the sentences for bad ones), `route_*` (one module an
endpoint), what turns a body into an `asking.Ask` (`chat`, `completions`, `messages`, `responses`),
the desk that admits asks and the streams that answer them, and the layers around every request
(identity, deadline, authentication, limits, logs). Never touches MLX, plans a step or applies an
event: the engine is reached through `desk` alone.
"""

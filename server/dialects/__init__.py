"""How families of models write tool calls and reasoning, and how to take their text apart.

Owns the splitters that turn answer text into `parts` (text, reasoning, tool calls) and the grammars
that force a call, chosen by `dialect` from what the chat template says. Never sees HTTP or tokens.
"""

"""Real clients, as pip and npm install them, against a real server: `make clients`.

Not among the other tests: the environments take minutes and a gigabyte.
"""

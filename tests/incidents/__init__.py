"""The incidents that the project exists for, each as a test of the whole path with real forwards.

Every file has the incident's right behaviour, and its fault put back, which replay must name.
"""

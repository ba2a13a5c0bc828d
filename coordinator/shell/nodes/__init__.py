"""Nodes as this coordinator knows them: who may join, who is connected, how fast they are and for
which job they work.
"""

"""Layers in processes of their own: a directory of who lives where, a coordinator, and slices, held together by
ZooKeeper."""

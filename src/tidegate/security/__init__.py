"""Protects what must stay private: the secrets of a process, the files of a user, and the names of publishers."""

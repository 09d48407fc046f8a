"""A cluster runs the layers in processes of their own: a directory in ZooKeeper lists the live slices and their
addresses, and a coordinator changes the configuration."""

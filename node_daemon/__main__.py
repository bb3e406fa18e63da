"""`python -m node_daemon`: the same as the command `tocsin-node-daemon`."""

from node_daemon.main import main

main()

# Read by `jupyter lab notebooks` when it is started here. JupyterLab refuses to run as root unless
# told, and in a container there is often no other user.
c.ServerApp.allow_root = True  # noqa: F821

from helix_store.contrib import _frameworks


class AgentFrameworkConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.agent_framework"
    label = "helix_store_agent_framework"
    verbose_name = "Microsoft Agent Framework"

from helix_store.contrib import _frameworks


class ClaudeAgentConfig(_frameworks.FrameworkConfig):
    name = "helix_store.contrib.claude_agent"
    label = "helix_store_claude_agent"
    verbose_name = "Claude Agent SDK"

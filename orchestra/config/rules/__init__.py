"""The rules that a configuration has to meet; `all_rules` checks them together."""

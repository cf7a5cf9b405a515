"""Programs: a lowered plan in (`inter.lower`), instructions for a runtime out, for all meshes or for one."""

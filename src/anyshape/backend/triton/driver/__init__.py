"""The driver API of a GPU's vendor, found when it is needed: functions by address, errors that say what to do."""

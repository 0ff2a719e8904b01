"""Settings.

What can be set: settings, entries, fields, units. How it is read: loading, defaults, overlay. What is refused: checks,
slot_checks, problems.
"""

from gateway.config.entries import (
    BucketSettings,
    CallerClassSettings,
    CallerLimitSettings,
    CredentialSettings,
    OriginCredentialSettings,
    SlotSettings,
)
from gateway.config.settings import (
    AdminSettings,
    CacheSettings,
    ClusterSettings,
    LoggingSettings,
    OriginSettings,
    ServerSettings,
    Settings,
    TracingSettings,
    public_settings,
    settings_from_json,
    settings_to_json,
)

__all__ = [
    "AdminSettings",
    "BucketSettings",
    "CacheSettings",
    "CallerClassSettings",
    "CallerLimitSettings",
    "ClusterSettings",
    "CredentialSettings",
    "LoggingSettings",
    "OriginCredentialSettings",
    "OriginSettings",
    "ServerSettings",
    "Settings",
    "SlotSettings",
    "TracingSettings",
    "public_settings",
    "settings_from_json",
    "settings_to_json",
]

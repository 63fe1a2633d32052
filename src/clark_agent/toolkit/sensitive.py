"""Rules for paths in a workspace that need a person's approval. The host can replace them.

Two kinds of access need a question: reading a file that looks like a secret, because whatever a
model reads may end up anywhere, and writing a file that other people or programs run without
looking at it. A `SensitivePath` is a rule for one of these:

    rules = [*SENSITIVE_PATHS, SensitivePath("deploy/**", "write", "it is deployed at once")]
    workspace = Workspace(root, sensitive=rules)

Files that a project's own build runs (``Makefile``, ``package.json``, ``setup.py``,
``conftest.py``) have no rule: they are source code, which an agent is meant to change, and run only
when the project is run. The rules look only at names. They do not restrict a shell, which can read
and write everything in the root.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct

from clark_agent.errors import ConfigError
from clark_agent.toolkit._descent import folded

__all__ = ["SENSITIVE_PATHS", "Access", "SensitivePath", "SensitiveRules"]

Access: TypeAlias = Literal["read", "write"]


class SensitivePath(Struct, frozen=True):
    """A rule: reading or writing such a path needs a person's approval.

    ``pattern`` is one name, or several with ``/`` between them, and matches the end of a path.
    ``*`` matches any part of a name; a final ``**`` matches everything below. Case is ignored. The
    first rule that matches decides; a rule without a ``reason`` allows the path.
    """

    pattern: str
    access: Access
    reason: str

    def __post_init__(self) -> None:
        pattern: Any = self.pattern
        if not isinstance(pattern, str) or not pattern.strip("/ "):
            raise ConfigError(f"SensitivePath: pattern must be a path, not {pattern!r}")
        if self.access not in get_args(Access):
            raise ConfigError(
                f"SensitivePath: access must be 'read' or 'write', not {self.access!r}"
            )


def _rules(access: Access, reason: str, patterns: str) -> list[SensitivePath]:
    return [SensitivePath(pattern, access, reason) for pattern in patterns.split()]


SENSITIVE_PATHS: tuple[SensitivePath, ...] = (
    *_rules("read", "", ".env.example .env.sample .env.template .env.dist .env.defaults"),
    *_rules(
        "read",
        "it looks like a file with secrets",
        """
        .env .env.* .env~ *.env .envrc .netrc _netrc .pgpass .my.cnf .htpasswd .git-credentials
        .npmrc .pypirc .yarnrc.yml .terraformrc .vault-token .dockercfg .docker/config.json
        .kube/config kubeconfig .aws/credentials .aws/config .azure/** .config/gcloud/**
        .config/gh/hosts.yml .cargo/credentials* .gem/credentials .m2/settings.xml .s3cfg .boto
        rclone.conf credentials credentials.json client_secret*.json service-account*.json
        *-service-account.json secrets.json secrets.yml secrets.yaml secrets.toml secrets.env
        *.tfstate *.tfstate.backup *.tfvars .password-store/** *.kdbx .bash_history .zsh_history
        .python_history .psql_history .local/share/keyrings/**
        """,
    ),
    *_rules(
        "read",
        "it looks like a private key",
        """
        .ssh/** .gnupg/** id_rsa id_dsa id_ecdsa id_ed25519 id_ecdsa_sk id_ed25519_sk
        ssh_host_*_key *.pem *.key *.p12 *.pfx *.jks *.keystore *.ppk
        """,
    ),
    *_rules(
        "write",
        "version control may run it",
        ".git .git/** *.git/hooks/** .hg/** .svn/** .jj/** .githooks/** .husky/** .gitattributes "
        ".gitmodules .pre-commit-config.yaml lefthook.yml",
    ),
    *_rules(
        "write",
        "continuous integration runs it, with rights and secrets of its own",
        """
        .github/workflows/** .github/actions/** .gitea/workflows/** .forgejo/workflows/**
        .gitlab-ci.yml .gitlab/** .circleci/** .buildkite/** .travis.yml .drone.yml
        .woodpecker.yml .woodpecker/** .cirrus.yml appveyor.yml azure-pipelines.yml
        bitbucket-pipelines.yml Jenkinsfile cloudbuild.yaml
        """,
    ),
    *_rules(
        "write",
        "a shell or the system runs it at its start",
        """
        .bashrc .bash_profile .bash_login .bash_logout .bash_aliases .profile .zshrc .zshenv
        .zprofile .zlogin .zlogout .kshrc .cshrc .tcshrc .login .logout .inputrc .config/fish/**
        .envrc .direnvrc .tmux.conf .xinitrc .xprofile .xsession .config/autostart/**
        .config/systemd/** LaunchAgents/** crontab .ssh/**
        """,
    ),
    *_rules(
        "write",
        "a program runs it when it starts in this folder",
        """
        .vscode/** .idea/** .vs/** .devcontainer/** .devcontainer.json .nvim.lua .exrc .vimrc .emacs
        .emacs.d/** .dir-locals.el .lldbinit .gdbinit .mise.toml .tool-versions .claude/**
        .cursor/** .mcp.json sitecustomize.py usercustomize.py *.pth .npmrc .yarnrc .yarnrc.yml
        .pnpmfile.cjs .cargo/config.toml
        """,
    ),
)
"""The default rules of a `Workspace`."""


class SensitiveRules:
    """Compiled rules: one regular expression search for each kind of access."""

    def __init__(self, rules: Iterable[SensitivePath]) -> None:
        given = tuple(rules)
        for rule in given:
            if not isinstance(rule, SensitivePath):
                raise ConfigError(f"sensitive must be a list of SensitivePath, but has {rule!r}")
        self._rules: dict[Access, tuple[SensitivePath, ...]] = {
            "read": tuple([rule for rule in given if rule.access == "read"]),
            "write": tuple([rule for rule in given if rule.access == "write"]),
        }

    def reason(self, path: str, access: Access) -> str | None:
        """Return why a person should approve this access, or None. The path is relative to the
        root.
        """
        rules = self._rules[access]
        found = _pattern(rules).match("/" + folded(path)) if rules else None
        if found is None or found.lastindex is None:
            return None
        return rules[found.lastindex - 1].reason or None


@lru_cache(maxsize=64)
def _pattern(rules: tuple[SensitivePath, ...]) -> re.Pattern[str]:
    """Return a pattern with one group for each rule; the first rule that matches wins."""
    return re.compile("(?:" + "|".join([_group(rule) for rule in rules]) + r")\Z", re.DOTALL)


def _group(rule: SensitivePath) -> str:
    text = re.escape(folded(rule.pattern.strip("/")))
    return "(.*/" + text.replace(r"\*\*", ".*").replace(r"\*", "[^/]*") + ")"

#!/usr/bin/env bash
# Debian's zsh without root: bash tests/support/zsh.sh FOLDER downloads and unpacks it, and writes FOLDER/zsh.
set -euo pipefail
mkdir -p "$1/packages"
folder="$(realpath "$1")"
cd "$folder/packages"
apt-get -q download zsh zsh-common
for package in *.deb; do dpkg -x "$package" "$folder/root"; done
functions="$(find "$folder/root/usr/share/zsh/functions" -type d | paste -sd:)"
modules="$(echo "$folder"/root/usr/lib/*/zsh/*)"
cat > "$folder/zsh" << END
#!/bin/sh
# Neither its functions nor its modules are where zsh looks for them; ~/.zshrc sets module_path.
export FPATH='$functions' ZSH_MODULES='$modules'
exec '$folder/root/bin/zsh' "\$@"
END
chmod +x "$folder/zsh"

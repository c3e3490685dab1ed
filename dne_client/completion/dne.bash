# Completion of dne, dne-train, dne-store and dne-serve for bash 3.2 and newer.
# Load it in ~/.bashrc:  source <(dne completion bash)

# Every line is PATH|WORD|KIND|MEANING. KIND is command, switch, value, file, folder or =CHOICES.
_dne_words() {
    cat <<'DNE_WORDS'
@WORDS@
DNE_WORDS
}

# Set `kind` to that of a word below a path, or to nothing.
_dne_kind() {
    local path word found _
    kind=
    while IFS='|' read -r path word found _; do
        [[ $path == "$1" && $word == "$2" ]] && kind=$found && return
    done <<<"$words"
}

_dne_files() {
    local found
    compopt -o filenames 2>/dev/null
    while IFS= read -r found; do COMPREPLY+=("$found"); done < <(compgen "$1" -- "$current")
}

_dne() {
    local path='' kind='' awaited='' word at words row_path row_word row_kind _
    local current=${COMP_WORDS[COMP_CWORD]}
    words=$(_dne_words)
    COMPREPLY=()
    word=${COMP_WORDS[0]##*/}
    [[ $word == dne-* ]] && path=${word#dne-}
    for ((at = 1; at < COMP_CWORD; at++)); do
        word=${COMP_WORDS[at]}
        [[ $word == = ]] && continue # bash parts --option=value at its sign
        if [[ -n $awaited ]]; then
            awaited=
            continue
        fi
        _dne_kind "$path" "$word"
        case $kind in
            command) path=${path:+$path }$word ;;
            switch | '') ;;
            *) awaited=$kind ;;
        esac
    done
    [[ $current == = ]] && current=
    if [[ -z $awaited && $current != -* ]]; then
        while IFS='|' read -r row_path row_word row_kind _; do
            [[ $row_path == "$path" && $row_kind == command ]] && COMPREPLY+=("$row_word")
        done <<<"$words"
        if ((${#COMPREPLY[@]})); then
            awaited="=${COMPREPLY[*]}"
            COMPREPLY=()
        else
            _dne_kind "$path" '*'
            awaited=$kind
        fi
    fi
    case $awaited in
        file) _dne_files -f ;;
        folder) _dne_files -d ;;
        =*) COMPREPLY=($(compgen -W "${awaited#=}" -- "$current")) ;;
        '')
            while IFS='|' read -r row_path row_word _; do
                [[ $row_path == "$path" && $row_word == "$current"* && $row_word == -* ]] &&
                    COMPREPLY+=("$row_word")
            done <<<"$words"
            ;;
    esac
}

complete -F _dne dne dne-train dne-store dne-serve

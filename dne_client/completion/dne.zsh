#compdef dne dne-train dne-store dne-serve
# Completion of dne, dne-train, dne-store and dne-serve for zsh.
# Load it in ~/.zshrc, after compinit:  source <(dne completion zsh)

# Every line is PATH|WORD|KIND|MEANING. KIND is command, switch, value, file, folder or =CHOICES.
_dne_words() {
    cat <<'DNE_WORDS'
@WORDS@
DNE_WORDS
}

# Set `kind` to that of a word below a path, or to nothing.
_dne_kind() {
    local row
    kind=
    for row in $rows; do
        [[ $row == "$1|$2|"* ]] && kind=${${row#"$1|$2|"}%%\|*} && return
    done
}

# Fill `offered` with the words below a path of which the start and the kind are given.
_dne_offer() {
    local row
    offered=()
    for row in $rows; do
        [[ $row == "$1|$2"*"|$3"* ]] && offered+=("${${row#"$1|"}%%\|*}:${row##*\|}")
    done
}

_dne() {
    local place='' kind='' awaited='' word
    local -a rows offered
    rows=("${(@f)$(_dne_words)}")
    word=${words[1]:t}
    [[ $word == dne-* ]] && place=${word#dne-}
    for word in "${(@)words[2,CURRENT-1]}"; do
        if [[ -n $awaited ]]; then
            awaited=
            continue
        fi
        _dne_kind "$place" "$word"
        case $kind in
            command) place=${place:+$place }$word ;;
            switch | '') ;;
            *) awaited=$kind ;;
        esac
    done
    word=$words[CURRENT]
    if [[ -z $awaited && $word == --*=* ]]; then
        _dne_kind "$place" "${word%%=*}"
        awaited=$kind
        compset -P '*='
    elif [[ -z $awaited && $word != -* ]]; then
        _dne_offer "$place" '' 'command|'
        if (( $#offered )); then
            _describe -V command offered
            return
        fi
        _dne_kind "$place" '*'
        awaited=$kind
    fi
    case $awaited in
        file) _files ;;
        folder) _files -/ ;;
        '='*) compadd -- ${=awaited#=} ;;
        '')
            _dne_offer "$place" '--' ''
            _describe -o option offered
            ;;
    esac
}

# As a file _dne of $fpath this is the body of the function; otherwise it is sourced.
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
    _dne "$@"
else
    compdef _dne dne dne-train dne-store dne-serve
fi
